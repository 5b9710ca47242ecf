"""What every sandbox runtime must do: subclass ``RuntimeConformance`` in a test module and run pytest.

::

    class TestMyRuntime(RuntimeConformance):
        factory = "my_package.my_runtime:MyRuntime"  # called with data_dir=Path

The checks are plain ``async def`` methods that take pytest's ``tmp_path``. Those of isolation and of
limits run where the runtime's report claims them. Processes are looked for on the host through
``/proc`` by a number that only the check knows.
"""

from __future__ import annotations

from rollserve.testing.runtime_conformance_bounds import BoundChecks
from rollserve.testing.runtime_conformance_files import FileChecks
from rollserve.testing.runtime_conformance_life import LifeChecks
from rollserve.testing.runtime_conformance_ports import PortChecks
from rollserve.testing.runtime_conformance_programs import ProgramChecks
from rollserve.testing.runtime_conformance_shell import ShellChecks
from rollserve.testing.runtime_conformance_snapshots import SnapshotChecks


class RuntimeConformance(
    ShellChecks, ProgramChecks, FileChecks, LifeChecks, BoundChecks, PortChecks, SnapshotChecks
):
    """Subclass as ``Test…``; set ``factory`` to ``module:callable``, and say ``image_reference`` where the
    runtime has no image ``host``."""
