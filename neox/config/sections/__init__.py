"""Typed sections: each flat NeoX key belongs to exactly one."""
