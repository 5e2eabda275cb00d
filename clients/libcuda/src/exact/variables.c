// SPDX-License-Identifier: MIT
/* Parameters of launches that lead to variables of modules. */
#include <string.h>

#include "exact/params.h"
#include "failover/line.h"

#define LARGE ((size_t)64)	/* bytes of a parameter that is an array of something */

/* Bytes from where the parameter that has this word begins to where the next one does. */
static size_t size_around(const struct mpsd_op *op, size_t at)
{
	size_t begins = 0, ends = op->launch.bytes;

	for (unsigned int i = 0; i < op->launch.count; i++) {
		size_t offset = (size_t)((char *)op->launch.parameters[i] - op->launch.buffer);

		if (offset <= at && offset > begins)
			begins = offset;
		if (offset > at && offset < ends)
			ends = offset;
	}
	return ends - begins;
}

/*
 * Of a large parameter programs mostly fill a part. PyTorch's torch.cat hands its kernels kilobytes of its stack, where an
 * address of cuBLAS' may be left, which no kernel of PyTorch's uses: there a variable is one of the kernel's own module alone.
 */
static bool is_left_over(const struct mpsd_op *op, size_t at, CUdeviceptr word)
{
	return op->launch.count && size_around(op, at) > LARGE && !mpsd_variable_is_of(word, op->launch.function);
}

void mpsd_params_follow_variables(struct mpsd_op *op)
{
	if (!mpsd_knows_variables())
		return;
	for (size_t at = 0; at + sizeof(CUdeviceptr) <= op->launch.bytes; at += sizeof(CUdeviceptr)) {
		CUdeviceptr word;

		memcpy(&word, op->launch.buffer + at, sizeof(word));
		if (!mpsd_is_variable(word))
			continue;
		if (!is_left_over(op, at, word))
			mpsd_line_opaque("a kernel with a module variable as parameter");
		word = mpsd_address(word);
		memcpy(op->launch.buffer + at, &word, sizeof(word));
	}
}
