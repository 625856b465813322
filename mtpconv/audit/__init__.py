"""The auditor: two inventories in, findings out; no printing, no exit codes here."""
