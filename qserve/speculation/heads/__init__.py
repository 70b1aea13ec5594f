"""Draft heads as the engine runs them: EAGLE-3, EAGLE and Medusa, a module each."""
