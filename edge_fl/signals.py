"""How a process ended, in words: the names of signals."""

import signal


def name(code: int) -> str:
    """The name of the signal in a return code of `subprocess`, such as SIGSEGV for -11; "" if no signal ended the process."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def ending(code: int) -> str:
    """How a process ended: "ended with exit code 1", or "was ended by SIGILL (illegal instruction)"."""
    if not (ended_by := name(code)):
        return f"ended with exit code {code}"
    meaning = signal.strsignal(-code)
    return f"was ended by {ended_by}" + (f" ({meaning.lower()})" if meaning else "")
