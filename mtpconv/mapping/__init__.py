"""The mapping language: tables, ops, layouts, plans and the static rules over them.

Nothing here reads a checkpoint; a plan is pure data that the stores are read and written by.
"""
