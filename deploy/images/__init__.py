"""The parts of an image of Topspin beside the installed package."""
