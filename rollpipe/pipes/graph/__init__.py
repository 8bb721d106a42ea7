"""The base of every pipe, and how a graph of pipes is edited and drawn."""
