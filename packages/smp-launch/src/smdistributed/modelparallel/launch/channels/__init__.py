"""How a job gets its data.

file      a folder of files
pipe      a named pipe for each epoch
framing   records in a stream
dataset   the reader of pipes for TensorFlow
"""
