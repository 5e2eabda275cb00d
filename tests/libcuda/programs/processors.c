// SPDX-License-Identifier: MIT
/* processors.c in imitated control groups: GROUPS ROOT. Prints "several" or "one". */
#include "processors.h"

#include <stdio.h>

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	puts(mpsd_processors_are_several(argv[1], argv[2]) ? "several" : "one");
	return 0;
}
