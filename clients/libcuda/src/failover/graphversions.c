// SPDX-License-Identifier: MIT
/* Calls of older versions of cuda.h, which programs find by their names: as the newest ones, which say more. */
#include "failover/nodes.h"
#include "proxy.h"

static CUDA_KERNEL_NODE_PARAMS newer(const CUDA_KERNEL_NODE_PARAMS_v1 *given)
{
	return (CUDA_KERNEL_NODE_PARAMS){
		.func = given->func,
		.gridDimX = given->gridDimX, .gridDimY = given->gridDimY, .gridDimZ = given->gridDimZ,
		.blockDimX = given->blockDimX, .blockDimY = given->blockDimY, .blockDimZ = given->blockDimZ,
		.sharedMemBytes = given->sharedMemBytes, .kernelParams = given->kernelParams, .extra = given->extra,
	};
}

CUresult make_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
				   size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (nodeParams)
		given = newer(nodeParams);
	return make_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies,
					    nodeParams ? &given : NULL);
}

CUresult make_cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (nodeParams)
		given = newer(nodeParams);
	return make_cuGraphKernelNodeSetParams_v2(hNode, nodeParams ? &given : NULL);
}

CUresult make_cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode,
					     const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
	CUDA_KERNEL_NODE_PARAMS given;

	if (nodeParams)
		given = newer(nodeParams);
	return make_cuGraphExecKernelNodeSetParams_v2(hGraphExec, hNode, nodeParams ? &given : NULL);
}

CUresult make_cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out,
				CUgraphExecUpdateResult *updateResult_out)
{
	CUgraphExecUpdateResultInfo info = { .result = CU_GRAPH_EXEC_UPDATE_ERROR };
	CUresult result;

	if (!updateResult_out)
		return CUDA_ERROR_INVALID_VALUE;
	result = make_cuGraphExecUpdate_v2(hGraphExec, hGraph, &info);
	if (hErrorNode_out)
		*hErrorNode_out = info.errorNode;
	*updateResult_out = info.result;
	return result;
}

/* What the older ones write into `logBuffer` is a text that nobody has to have. */
static CUresult instantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	CUresult result = make_cuGraphInstantiateWithFlags(exec, graph, 0);

	if (result == CUDA_SUCCESS && error)
		*error = NULL;
	if (result == CUDA_SUCCESS && log && size)
		*log = 0;
	return result;
}

CUresult make_cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
				 size_t bufferSize)
{
	return instantiate(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}

CUresult make_cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer,
				    size_t bufferSize)
{
	return instantiate(phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize);
}
