"""Engine options: names, rules and help texts."""
