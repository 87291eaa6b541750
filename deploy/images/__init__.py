"""What an image of Topspin has beside the installed package."""
