"""What every test process needs: the signals of an ordinary shell."""

import signal

# Under nohup, or in the background of a script, SIGHUP or SIGINT is ignored, and every process that a test starts would
# inherit that; the tests send these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
