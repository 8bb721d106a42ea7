"""Where the time of a graph goes: clocks in its stages, and what they show."""
