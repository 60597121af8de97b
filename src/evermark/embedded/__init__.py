"""What Evermark needs and a machine may lack, found or brought along: Java for Spark, Postgres for State."""
