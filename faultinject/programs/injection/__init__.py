"""How the offender commits each fault."""
