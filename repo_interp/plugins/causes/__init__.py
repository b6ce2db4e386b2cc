"""What positions of heads cause: effects of changed positions, and saliency."""
