"""Problems made smaller, with the way back."""
