// SPDX-License-Identifier: MIT
#include "connect.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

int mpsd_connect(const char *path, int send_s, int receive_s)
{
	struct timeval sending = { .tv_sec = send_s }, receiving = { .tv_sec = receive_s };
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	/* Also for connect(2), where nobody accepts. */
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &sending, sizeof(sending));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &receiving, sizeof(receiving));
	strcpy(address.sun_path, path);
	if (!connect(fd, (struct sockaddr *)&address, sizeof(address)))
		return fd;
	close(fd);
	return -1;
}
