"""The one thread that touches blocks and caches.

executor       the way there and back, for the event loop
device_thread  the thread
calls          what it is asked to compute
scheduler      what it computes next
fairness       whose turn it is
precedence     what some may cost those who come first
burst_wait     whether it waits a moment for more decode steps
niceness       how it gives way to the owner's programs
load_meter     how busy it is
accelerator    a device that computes beside the thread
device         what the server computes on
memory         how many blocks, and how much cache, its memory takes
"""
