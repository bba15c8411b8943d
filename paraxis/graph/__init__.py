"""Small questions about FX nodes that every later stage asks: arguments, shapes, modules, what is written to."""
