"""The means of the tests of real processes: servers, streams, hosts, pods, disturbances."""
