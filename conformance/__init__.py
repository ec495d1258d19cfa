"""Conformance with the documented API: cases for every row of the specification.

    python -m conformance --framework torch --report out/

``rows.yaml`` says what is specified; ``cases`` try it, each case on processes of its own kind
(``worlds``); ``adapters`` are all that a case knows of a framework; ``report`` holds rows and cases
against each other.
"""
