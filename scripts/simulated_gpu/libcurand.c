/* cuRAND: generators that draw nothing, and know their seed. */
#include "state.h"

#include <stdlib.h>

CREATES(curandCreateGenerator)

/* What values.cc reads of a generator: its seed, and what draws for it since it was seeded. */
struct generator {
  unsigned long long seed;
  void *draws;
};

int curandSetPseudoRandomGeneratorSeed(struct generator *generator, unsigned long long seed) {
  *generator = (struct generator){seed, NULL};
  return simulated.sticky;
}

DESTROYS(curandDestroyGenerator)
SUCCEEDS(curandSetGeneratorOffset)
SUCCEEDS(curandSetStream)
LAUNCHES(curandGenerate)
LAUNCHES(curandGenerateNormal)
LAUNCHES(curandGenerateNormalDouble)
LAUNCHES(curandGenerateUniform)
LAUNCHES(curandGenerateUniformDouble)
