// SPDX-License-Identifier: MIT
#include "hostplan.h"

#include <stdio.h>
#include <string.h>

#define LOWEST ((uint64_t)8 << 30)
#define PATH_ROOM 256
#define LINE_ROOM (PATH_ROOM + 80)

struct row {
	uint64_t start, end;
	char access[5], path[PATH_ROOM];
};

struct plan {
	const struct host_range *holes;
	size_t hole_count;
	uint64_t bytes;			/* that may still be covered */
	struct host_range *ranges;
	size_t count, most;
};

/* False at the end. `*text` is moved behind the row. Line by line, for sscanf goes to the end of what it is given. */
static bool read_row(const char **text, struct row *row)
{
	size_t length = strcspn(*text, "\n");
	char line[LINE_ROOM];
	unsigned long long start, end;
	int path = 0;

	snprintf(line, sizeof(line), "%.*s", (int)(length < sizeof(line) ? length : sizeof(line) - 1), *text);
	if (sscanf(line, "%llx-%llx %4s %*s %*s %*s %n", &start, &end, row->access, &path) < 3 || !path)
		return false;
	row->start = start;
	row->end = end;
	snprintf(row->path, sizeof(row->path), "%s", line + path);
	*text += length + ((*text)[length] != 0);
	return true;
}

static bool begins(const char *text, const char *with)
{
	return !strncmp(text, with, strlen(with));
}

/* Rows of one file follow one another: whether one of them, from this one on, holds code. */
static bool is_code(const char *from, const char *path)
{
	struct row row;
	bool is = false;

	while (!is && read_row(&from, &row) && !strcmp(row.path, path))
		is = row.access[2] == 'x';
	return is;
}

static bool is_deleted(const char *path)
{
	static const char mark[] = " (deleted)";
	size_t length = strlen(path);

	return length >= sizeof(mark) && !strcmp(path + length - sizeof(mark) + 1, mark);
}

/* The latest one: a program or library, or one whose data the program may register. */
struct file {
	char path[PATH_ROOM];
	bool is_code;
};

static bool is_guarded(const struct row *row, const char *from, struct file *file)
{
	if (row->start < LOWEST || row->access[3] != 'p' || (row->access[0] != 'r' && row->access[1] != 'w'))
		return false;
	if (!*row->path || begins(row->path, "[anon:") || !strcmp(row->path, "[heap]") ||
	    !strcmp(row->path, "[stack]"))
		return true;
	if (*row->path != '/' || begins(row->path, "/dev/") || begins(row->path, "/memfd:") ||
	    begins(row->path, "/SYSV") || begins(row->path, "/anon_hugepage") || is_deleted(row->path))
		return false;
	if (strcmp(file->path, row->path)) {
		strcpy(file->path, row->path);
		file->is_code = is_code(from, row->path);
	}
	return file->is_code;
}

static void emit_piece(struct plan *plan, uint64_t base, uint64_t size)
{
	if (plan->count == plan->most || size > plan->bytes)
		return;
	plan->ranges[plan->count++] = (struct host_range){ base, size };
	plan->bytes -= size;
}

/* Whole granules only, none that a neighbour shares. */
static void emit(struct plan *plan, uint64_t start, uint64_t end)
{
	uint64_t base = (start + HOSTPLAN_GRANULE - 1) / HOSTPLAN_GRANULE * HOSTPLAN_GRANULE;
	uint64_t last = end / HOSTPLAN_GRANULE * HOSTPLAN_GRANULE;

	while (base < last) {
		uint64_t next = (base / HOSTPLAN_PIECE + 1) * HOSTPLAN_PIECE;
		uint64_t size = (next < last ? next : last) - base;

		emit_piece(plan, base, size);
		base += size;
	}
}

static const struct host_range *first_hole(const struct plan *plan, uint64_t start, uint64_t end)
{
	const struct host_range *first = NULL;

	for (size_t i = 0; i < plan->hole_count; i++) {
		const struct host_range *hole = &plan->holes[i];

		if (hole->base < end && hole->base + hole->size > start && (!first || hole->base < first->base))
			first = hole;
	}
	return first;
}

static void emit_around_holes(struct plan *plan, uint64_t start, uint64_t end)
{
	const struct host_range *hole;

	while (start < end && (hole = first_hole(plan, start, end))) {
		if (hole->base > start)
			emit(plan, start, hole->base);
		start = hole->base + hole->size;
	}
	if (start < end)
		emit(plan, start, end);
}

size_t mpsd_hostplan(const char *maps, bool (*is_off)(uint64_t base, size_t size), const struct host_range *holes,
		     size_t hole_count, uint64_t bytes, struct host_range *ranges, size_t most)
{
	struct plan plan = { .holes = holes, .hole_count = hole_count, .bytes = bytes, .ranges = ranges, .most = most };
	uint64_t start = 0, end = 0;
	struct file file = { .is_code = false };
	struct row row;

	for (const char *from = maps; read_row(&maps, &row); from = maps) {
		if (!is_guarded(&row, from, &file) || is_off(row.start, row.end - row.start))
			continue;
		if (row.start != end) {
			emit_around_holes(&plan, start, end);
			start = row.start;
		}
		end = row.end;
	}
	emit_around_holes(&plan, start, end);
	return plan.count;
}
