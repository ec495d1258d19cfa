"""What a call does, tried apart from the job: nothing of a trial is left behind.

A trial answers a question before the step depends on it: may microbatches interleave in this
module (``turns``, ``passes``), what shapes come out where fakes do not suffice
(``on_random_numbers``), what does a function write to and draw (``on_fakes``), what of a difference
is rounding (``rounding``). ``alone`` runs code past all modes of the script. What no trial can show
is looked for while the step runs (``deciding``).
"""
