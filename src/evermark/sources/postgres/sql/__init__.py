"""The SQL that `evermark source install` runs in the user's database, one file per step."""
