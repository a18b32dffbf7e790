/* cuSPARSE: MXNet calls none of its functions. */
