drop publication if exists @publication@;
