"""``triptych up``, with stubs in place of the services."""

from triptych.cli import process_plan
from triptych.cli.main import main

process_plan.package_of = lambda service: "tests.unit.cli.stub_service"
main()
