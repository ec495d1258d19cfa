"""What Python holds: whether it has changed, what to call it, how to put it back.

``reach.Reach`` walks once over all that modules and code can reach: attributes, slots, containers,
classes, globals, closures, generators, tensors. Each thing that can change becomes a *holder*
(``holders``): the thing, the path that names it, and how its kind is read and put back. On these
stand the users:

- ``snapshot.Snapshot``: what has changed since, and putting it back. A module that counts its calls
  runs on fakes; the snapshot tells ``net.count`` and sets it back, so that step 1 finds 0.
- ``identities.Identities``: whether all of it is as it was, in one go, at each call of a module.
- ``growth``: what was put into a container and nothing else, as a log.
- ``carried``: objects handed from module to module, such as a cache; each rank has a copy.
- ``seen``, ``reads``, ``alike``: what a proof has read of a module, and whether another is alike.

``switches``, ``python_random`` and ``caches`` are state of the process, not of modules.
"""
