"""Draft heads: EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark, Medusa and MTP."""
