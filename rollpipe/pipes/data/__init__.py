"""What flows: fragments and the arrays in them, their returns, and the errors that name a culprit."""
