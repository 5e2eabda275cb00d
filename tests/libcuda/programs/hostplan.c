// SPDX-License-Identifier: MIT
/* Prints what a guard may cover of the mappings on its standard input: hostplan BYTES [HOLE SIZE]... */
#include "hostplan.h"

#include <stdio.h>
#include <stdlib.h>

#define MOST 64

static bool is_off(uint64_t base, size_t size)
{
	return base < 0x210000000000 && base + size > 0x200000000000;
}

int main(int count, char **words)
{
	static char text[1 << 20];
	struct host_range ranges[MOST], holes[MOST];
	size_t hole_count = 0, found;

	text[fread(text, 1, sizeof(text) - 1, stdin)] = 0;
	for (int i = 2; i + 1 < count; i += 2)
		holes[hole_count++] = (struct host_range){ strtoull(words[i], NULL, 0), strtoull(words[i + 1], NULL, 0) };
	found = mpsd_hostplan(text, is_off, holes, hole_count, strtoull(words[1], NULL, 0), ranges, MOST);
	for (size_t i = 0; i < found; i++)
		printf("%llx %llx\n", (unsigned long long)ranges[i].base, (unsigned long long)ranges[i].size);
	return 0;
}
