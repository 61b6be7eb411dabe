"""A simulated server on a machine that is too slow says by how much it fell behind."""

import asyncio
import time

from servelab_lab.server import drive


class OneRequest:
    """An engine with three steps of 50 ms; whoever ends the second holds the processor for 300 ms."""

    idle = True
    late_seconds = 0.0

    def __init__(self) -> None:
        self.steps = 0

    def submit(self, request):
        self.idle = True

    def begin(self):
        return 50.0

    def finish_step(self):
        self.steps += 1
        if self.steps == 1:
            time.sleep(0.3)
        return 50.0 if self.steps < 3 else None


def test_lost_time_is_counted_and_only_lost_time():
    async def drive_it():
        engine = OneRequest()
        driver = drive.Driver(engine, 1.0, lambda seconds: None)
        driver.submit(None)
        while engine.steps < 3:
            await asyncio.sleep(0.01)
        return engine.late_seconds

    # The second step was due 50 ms after the first ended, and could end only after 300 ms: 250 ms are lost.
    assert 0.24 <= asyncio.run(drive_it()) < 1.0
