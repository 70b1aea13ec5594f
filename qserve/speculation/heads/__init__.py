"""Draft heads in the engine: EAGLE, EAGLE-3, Medusa and MTP."""
