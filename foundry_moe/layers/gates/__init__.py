"""Gates, one file each; `registry` finds them by name, `keys` checks a user's keys. Both import no torch."""
