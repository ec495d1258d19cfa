"""Models behind endpoints: processes of this machine that answer requests.

folder      the folder of an endpoint, and how it stands
service     models, configurations and endpoints by name: what the doors call
wire        a request to an endpoint, over a socket that only this user reaches
server      the process of an endpoint: KServe's server; ``python -m`` it with an endpoint's folder
fetching    the model and its script, from their archives
content     arrays as JSON, CSV, NumPy's format
handlers    what computes answers: one for each framework
"""
