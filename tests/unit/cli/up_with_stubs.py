"""``triptych up``, with stubs in place of the services."""

from triptych.cli import cluster as module
from triptych.cli.main import main

module._module = lambda service: "tests.unit.cli.stub_service"
main()
