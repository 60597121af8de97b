"""The numbered migrations of State. Forward only: a file that was released is never changed again."""
