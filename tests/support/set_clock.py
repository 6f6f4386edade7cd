"""Sets a clock and waits for it, as no part of the package does."""


def set_clock(clocks, clock_mhz):
    """Request a clock of a controller, and return when the driver has accepted it, or refused."""
    clocks.request(clock_mhz)
    clocks.call(lambda: 0.0).value()
