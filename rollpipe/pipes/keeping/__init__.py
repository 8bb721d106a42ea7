"""What is kept, and how it is written: plain data, files, chunks of large arrays, random states."""
