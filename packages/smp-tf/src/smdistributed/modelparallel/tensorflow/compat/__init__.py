"""What is used of TensorFlow and of Keras beyond their public APIs, a module for each subject.

``self_test`` says whether the installed TensorFlow still has it; the unit tests run it for each
version that the package claims. No other folder imports ``tensorflow.python``.
"""
