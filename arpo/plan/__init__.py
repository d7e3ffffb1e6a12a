"""What a training step would cost on other machines: `arpo plan`. Pure arithmetic and a simulation; no torch."""
