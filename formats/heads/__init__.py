"""Draft heads on disk (EAGLE-3, EAGLE, Medusa): their config.json and tensor names."""
