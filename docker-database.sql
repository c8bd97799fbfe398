-- Run once, when the database's volume is new, by the superuser `postgres` over the container's own socket.
-- The service has a role that owns its database and nothing else; over the network the superuser cannot log in.
\getenv password POSTGRES_PASSWORD
CREATE ROLE steptune LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE PASSWORD :'password';
CREATE DATABASE steptune OWNER steptune;
ALTER ROLE postgres PASSWORD NULL;
