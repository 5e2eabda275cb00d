// SPDX-License-Identifier: MIT
/*
 * Most of what kernels read they never write: the weights of a model. That cannot be seen in their parameters, and to
 * save it all in each epoch costs more than the work itself. Validation sees what a launch has changed, so which of its
 * words lead to what changed. A word that ever did counts as written, in whichever run of the program that was.
 *
 * A line for each kernel: its name, a print, how many words, which of them read and which write (hexadecimal digits, the
 * first word is the lowest bit of the first of each sixteen).
 */
#include "exact/readers.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "exact/named.h"
#include "exact/state.h"
#include "failover/line.h"

#define VARIABLE "MPSD_FAILOVER_READS"
#define HEAD "mpsd reads 1"
#define MOST_WORDS 4096u	/* of 32 KiB of parameters */
#define BUCKETS 4096u
#define DIGITS 16
#define SELDOM_NS 1000000000ull

static struct mpsd_reader *buckets[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;	/* of the buckets */
static char *path;
static bool learns, has_failed;
static enum { NO_NEWS, NEWS_OF_READS, NEWS_OF_WRITES } news;	/* since it was written last, */
static uint64_t kept_ns;					/* at that time */
MPSD_READ_OFTEN bool mpsd_readers_any;

/* FNV-1a. */
#define BASIS 0xcbf29ce484222325ull

static uint64_t mix(uint64_t print, const void *bytes, size_t size)
{
	for (size_t i = 0; i < size; i++)
		print = (print ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3ull;
	return print;
}

static struct mpsd_reader **bucket_of(const char *name)
{
	return &buckets[mix(BASIS, name, strlen(name)) % BUCKETS];
}

static size_t parts_of(uint32_t words)
{
	return (words + 63) / 64;
}

static struct mpsd_reader *find(const char *name, uint64_t print, uint32_t words)
{
	struct mpsd_reader *reader = *bucket_of(name);

	while (reader && (reader->print != print || reader->words != words || strcmp(reader->name, name) != 0))
		reader = reader->next;
	return reader;
}

static void free_one(struct mpsd_reader *reader)
{
	free(reader->name);
	free(reader->reads);
	free(reader->writes);
	free(reader);
}

static struct mpsd_reader *add(const char *name, uint64_t print, uint32_t words)
{
	struct mpsd_reader *reader = calloc(1, sizeof(*reader));
	struct mpsd_reader **bucket = bucket_of(name);

	if (!reader)
		return NULL;
	*reader = (struct mpsd_reader){
		*bucket, strdup(name), print, words, calloc(parts_of(words), sizeof(uint64_t)),
		calloc(parts_of(words), sizeof(uint64_t)),
	};
	if (reader->name && reader->reads && reader->writes)
		return *bucket = reader;
	free_one(reader);
	return NULL;
}

static bool read_digits(const char *digits, uint32_t words, uint64_t *bits)
{
	size_t parts = parts_of(words);

	if (strlen(digits) != parts * DIGITS || strspn(digits, "0123456789abcdef") != parts * DIGITS)
		return false;
	for (size_t i = 0; i < parts; i++) {
		char part[DIGITS + 1] = { 0 };

		memcpy(part, digits + i * DIGITS, DIGITS);
		bits[i] |= strtoull(part, NULL, 16);
	}
	return true;
}

static bool read_number(const char *text, int base, uint64_t most, uint64_t *number)
{
	char *end;

	errno = 0;
	*number = strtoull(text, &end, base);
	return *text >= '0' && !*end && !errno && *number <= most;
}

/* False: it is no such line. */
static bool read_line(char *line)
{
	char *words[5], *rest = line;
	uint64_t print, count;
	struct mpsd_reader *reader;

	line[strcspn(line, "\n")] = 0;
	for (unsigned int i = 0; i < 5; i++)
		if (!(words[i] = strsep(&rest, " ")))
			return false;
	if (rest || !*words[0] || !read_number(words[1], 16, UINT64_MAX, &print) ||
	    !read_number(words[2], 10, MOST_WORDS, &count) || !count)
		return false;
	reader = find(words[0], print, (uint32_t)count);
	if (!reader)
		reader = add(words[0], print, (uint32_t)count);
	return reader && read_digits(words[3], reader->words, reader->reads) &&
	       read_digits(words[4], reader->words, reader->writes);
}

/* Where it is not understood nothing of it counts: 0, or the number of that line. */
static unsigned long read_file(FILE *file)
{
	char *line = NULL;
	size_t room = 0;
	unsigned long number = 1;
	bool is = getline(&line, &room, file) >= 0 && !strcmp(line, HEAD "\n");

	while (is && getline(&line, &room, file) >= 0) {
		number++;
		is = read_line(line);
	}
	free(line);
	return is ? 0 : number;
}

static void forget_all(void)
{
	for (unsigned int i = 0; i < BUCKETS; i++)
		while (buckets[i]) {
			struct mpsd_reader *reader = buckets[i];

			buckets[i] = reader->next;
			free_one(reader);
		}
}

static void read_all(void)
{
	FILE *file = fopen(path, "re");
	unsigned long wrong;

	if (!file) {
		mpsd_say(VARIABLE ": %s: %s; snapshots cover all memory that kernels may write", path, strerror(errno));
		return;
	}
	wrong = read_file(file);
	fclose(file);
	if (wrong) {
		forget_all();
		mpsd_say(VARIABLE ": %s: line %lu is invalid; snapshots cover all memory that kernels may write",
			 path, wrong);
	}
	mpsd_readers_any = !wrong;
}

void mpsd_readers_start(bool is_validated)
{
	const char *given = secure_getenv(VARIABLE);

	if (path || !given || !*given)
		return;
	/* A program may change its folder, and its environment. */
	path = *given == '/' ? strdup(given) : NULL;
	if (!path) {
		mpsd_say(VARIABLE ": not an absolute path; snapshots cover all memory that kernels may write");
		return;
	}
	learns = is_validated;
	if (learns)
		mpsd_readers_any = true;
	else
		read_all();
}

/* What another build of a kernel most likely has another one of. */
static const CUfunction_attribute ATTRIBUTES[] = {
	CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES,
	CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, CU_FUNC_ATTRIBUTE_PTX_VERSION, CU_FUNC_ATTRIBUTE_BINARY_VERSION,
};

static CUresult attribute_of(CUfunction function, bool is_kernel, CUfunction_attribute attribute, int *value)
{
	CUdevice device;
	CUresult result;

	if (!is_kernel)
		return real_cuFuncGetAttribute(value, attribute, mpsd_native(function));
	result = real_cuCtxGetDevice(&device);
	if (result != CUDA_SUCCESS)
		return result;
	return real_cuKernelGetAttribute(value, attribute, mpsd_native((CUkernel)function), device);
}

struct mpsd_reader *mpsd_reader_of(CUfunction function, bool is_kernel, const void *places, size_t size, uint32_t end)
{
	const char *name = mpsd_readers_any ? mpsd_name_of_function(function) : NULL;
	uint32_t words = end / MPSD_READER_WORD;
	uint64_t print = mix(BASIS, places, size);
	struct mpsd_reader *reader;

	if (!name || !*name || strpbrk(name, " \n") || !words || words > MOST_WORDS)
		return NULL;
	for (size_t i = 0; i < sizeof(ATTRIBUTES) / sizeof(*ATTRIBUTES); i++) {
		int value = 0;

		if (attribute_of(function, is_kernel, ATTRIBUTES[i], &value) != CUDA_SUCCESS)
			return NULL;
		print = mix(print, &value, sizeof(value));
	}
	pthread_mutex_lock(&lock);
	reader = find(name, print, words);
	if (!reader && learns)
		reader = add(name, print, words);
	pthread_mutex_unlock(&lock);
	return reader;
}

void mpsd_reader_saw(struct mpsd_reader *reader, size_t offset, bool has_changed)
{
	uint32_t word = (uint32_t)(offset / MPSD_READER_WORD);
	uint64_t *bits = has_changed ? reader->writes : reader->reads;

	if (word >= reader->words || bits[word / 64] >> word % 64 & 1)
		return;
	bits[word / 64] |= 1ull << word % 64;
	if (has_changed || news == NO_NEWS)
		news = has_changed ? NEWS_OF_WRITES : NEWS_OF_READS;
}

static void write_digits(FILE *file, const uint64_t *bits, uint32_t words)
{
	fputc(' ', file);
	for (size_t i = 0; i < parts_of(words); i++)
		fprintf(file, "%016" PRIx64, bits[i]);
}

static bool write_file(FILE *file)
{
	fputs(HEAD "\n", file);
	for (unsigned int i = 0; i < BUCKETS; i++)
		for (const struct mpsd_reader *reader = buckets[i]; reader; reader = reader->next) {
			fprintf(file, "%s %" PRIx64 " %" PRIu32, reader->name, reader->print, reader->words);
			write_digits(file, reader->reads, reader->words);
			write_digits(file, reader->writes, reader->words);
			fputc('\n', file);
		}
	return !fflush(file) && !ferror(file);
}

static int fail(int fd)
{
	int why = errno;

	close(fd);
	errno = why;
	return -1;
}

/* Of several processes one at a time. Whoever waited for it may have a file that was replaced: then again. -1: errno. */
static int open_locked(void)
{
	for (;;) {
		int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
		struct stat mine, now;

		int got = fd < 0 ? 0 : flock(fd, LOCK_EX);

		if (fd < 0)
			return -1;
		if (got && errno != EINTR)
			return fail(fd);
		if (got || fstat(fd, &mine)) {
			close(fd);
			continue;
		}
		if (!stat(path, &now) && now.st_ino == mine.st_ino && now.st_dev == mine.st_dev)
			return fd;
		close(fd);
	}
}

/* Beside it, and then in its place: who is interrupted leaves the one of before. */
static bool replace(void)
{
	char *fresh = NULL;
	FILE *file;
	bool is;

	if (asprintf(&fresh, "%s.%d", path, getpid()) < 0)
		return false;
	file = fopen(fresh, "we");
	is = file && write_file(file);
	if (file)
		is = !fclose(file) && is;
	is = is && !rename(fresh, path);
	if (file && !is) {
		int why = errno;

		unlink(fresh);
		errno = why;
	}
	free(fresh);
	return is;
}

static void write_all(void)
{
	unsigned long wrong = 0;
	FILE *before;
	int fd = open_locked();

	before = fd < 0 ? NULL : fdopen(fd, "r");
	pthread_mutex_lock(&lock);
	if (before && getc(before) != EOF) {
		rewind(before);
		wrong = read_file(before);
	}
	if (wrong)
		mpsd_say(VARIABLE ": %s: line %lu is invalid; the file is not changed", path, wrong);
	else if (!before || !replace())
		mpsd_say(VARIABLE ": %s: %s; the results of validation are not saved", path, strerror(errno));
	else
		has_failed = false;
	pthread_mutex_unlock(&lock);
	if (before)
		fclose(before);
	else if (fd >= 0)
		close(fd);
}

void mpsd_readers_keep(bool in_the_end)
{
	uint64_t now = mpsd_now_ns();

	if (!learns || has_failed || news == NO_NEWS ||
	    (news == NEWS_OF_READS && !in_the_end && now - kept_ns < SELDOM_NS))
		return;
	news = NO_NEWS;
	kept_ns = now;
	/* It is said once. */
	has_failed = true;
	write_all();
}
