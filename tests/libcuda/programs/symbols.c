/*
 * Reads the named code images, and broken ones made of them with one bad byte each: gcc's sanitizers see if the
 * reader trusts a bad byte. Prints the content of each image.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact/symbols.h"

#define ROUNDS 4000
#define MOST ((size_t)1 << 20)

static unsigned int seed = 1;
static size_t total;
static bool is_told;

static unsigned int chance(size_t of)
{
	return (unsigned int)rand_r(&seed) % (unsigned int)(of ? of : 1);
}

static void add(void *to, const char *name, size_t length)
{
	(void)to;
	for (size_t i = 0; i < length; i++)
		total += (unsigned char)name[i];
	if (is_told)
		printf(" %.*s", (int)length, name);
}

static void read_copy(const char *image, size_t size)
{
	struct mpsd_symbols found = { .add = add };
	char *copy = malloc(size ? size : 1);

	memcpy(copy, image, size);
	mpsd_symbols_read(copy, size, 90, &found);
	if (is_told)
		printf("%s%s\n", found.has_heap ? " heap" : "", found.is_unread ? " unread" : "");
	free(copy);
}

static void read_broken(const char *image, size_t size)
{
	char *copy = malloc(size);
	size_t less = chance(4) ? size : chance(size);

	memcpy(copy, image, size);
	for (unsigned int i = chance(8); i && less; i--)
		copy[chance(2) ? chance(less) : chance(less < 256 ? less : 256)] = (char)(chance(3) ? rand_r(&seed) : 0xff * (int)chance(2));
	read_copy(copy, less);
	free(copy);
}

int main(int count, char **names)
{
	static char image[MOST];

	mpsd_symbols_start();
	for (int i = 1; i < count; i++) {
		FILE *file = fopen(names[i], "rb");
		size_t size = file ? fread(image, 1, MOST, file) : 0;

		if (!size || fclose(file))
			return 1;
		is_told = true;
		read_copy(image, size);
		is_told = false;
		for (int round = 0; round < ROUNDS; round++)
			read_broken(image, size);
	}
	return total ? 0 : 1;
}
