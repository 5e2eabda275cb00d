// SPDX-License-Identifier: MIT
/* Prints the fields of MPSD_DEBUG as debug.c reads them: every text, then zone_bytes as a number from 4 to 64. */
#include "debug.h"

#include <stdarg.h>
#include <stdio.h>

#include "proxy.h"

void mpsd_say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
}

int main(void)
{
	for (int i = 0; i < MPSD_DEBUG_COUNT; i++)
		if (mpsd_debug_text((enum mpsd_debug)i))
			printf("%d %s\n", i, mpsd_debug_text((enum mpsd_debug)i));
	printf("%d\n", (int)mpsd_debug_number(MPSD_DEBUG_ZONE_BYTES, 7, 4, 4, 64));
	return 0;
}
