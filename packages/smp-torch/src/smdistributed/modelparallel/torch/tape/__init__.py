"""Tapes: what the Python of a pass asks of torch, so that it can be asked, and answered, again.

A *tape* is the list of calls of functions of torch that one pass made, each with its arguments and
what it gave. It answers two questions. *Run*, it computes the pass without Python (``running``):
that is what a CUDA graph captures. *Confirmed*, it stands in for torch while the Python of the pass
runs again: each call is compared with the next one of the tape, and answered with a *promise*, a
tensor without memory (``confirming``). A pass whose Python has come to its end as recorded would
have computed what the graph computes, so only then the graph is launched. Where Python goes another
way, promises are kept: what the tape has is computed, each promise becomes the tensor that it
stands for, and Python goes on with tensors. So Python runs once, whatever it does.
"""
