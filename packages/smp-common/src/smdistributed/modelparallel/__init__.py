"""The shared package of the model parallelism library.

Only ``smp-common`` ships this file. ``smdistributed`` above it is a namespace without an
``__init__.py``; ``extend_path`` lets ``smp-torch`` and ``smp-tf`` put their subpackages beside
``common`` from directories of their own, so wheels and editable installations mix freely.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

#: Level of the documented API that this implementation speaks. Published scripts compare it;
#: the version of each distribution comes from its own metadata.
__version__ = "1.15.0"
