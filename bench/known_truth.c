/* A streaming server of completions and chats with known timing, fast enough to be the truth for 1000 streams on one core.
 *
 *   known_truth PORT TTFT_US GAP_US TOKENS TOKENS_PER_CHUNK NOTES
 *
 * Every request is answered with its first chunk TTFT_US after its last byte arrived (by the kernel's receive stamp) and another
 * chunk every GAP_US. GET /truth writes to the file NOTES what really happened since the last time it was asked: when
 * chunks were handed to the socket, not when they should have been. 64-bit integers: the number of requests and of chunks, of
 * each request when it had arrived and when its first and last chunk went out, and when each chunk went out (ns since 1970).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 4096

struct stream {
    char in[65536];
    int have;
    int busy;         /* a response is being streamed */
    int64_t arrived;  /* of the request's last byte */
    int64_t due;      /* of the next chunk */
    int64_t first, last;
    int sent;         /* tokens */
    int chat;
};

static int poller;
static struct stream *streams[MAX_FD];
static int heap[MAX_FD], heap_size; /* fds by due */
static int64_t ttft, gap;
static int tokens, per_chunk;
static const char *notes;
static int64_t (*requests)[3], *chunks;
static int64_t n_requests, n_chunks, room_requests, room_chunks;

static void *more(void *what, int64_t n, int64_t *room, size_t size) {
    if (n < *room) return what;
    *room = *room ? 2 * *room : 1 << 20;
    what = realloc(what, *room * size);
    if (!what) perror("realloc"), exit(1);
    return what;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void push(int fd) {
    int i = heap_size++;
    while (i && streams[heap[(i - 1) / 2]]->due > streams[fd]->due) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = fd;
}

static int pop(void) {
    int top = heap[0], fd = heap[--heap_size], i = 0;
    for (;;) {
        int child = 2 * i + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && streams[heap[child + 1]]->due < streams[heap[child]]->due) child++;
        if (streams[heap[child]]->due >= streams[fd]->due) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = fd;
    return top;
}

static void answer(int fd, const char *body) {
    char out[1024];
    int n = snprintf(out, sizeof out, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     body ? "200 OK" : "404 Not Found", body ? strlen(body) : 0, body ? body : "");
    if (write(fd, out, n) != n) perror("write");
}

static void plain(int fd, const char *path) {
    if (!strncmp(path, "/v1/models", 10)) {
        answer(fd, "{\"object\":\"list\",\"data\":[{\"id\":\"known-truth\"}]}");
    } else if (!strncmp(path, "/health", 7)) {
        answer(fd, "{}");
    } else if (!strncmp(path, "/truth", 6)) {
        FILE *file = fopen(notes, "wb");
        if (!file) perror(notes), exit(1);
        fwrite(&n_requests, sizeof n_requests, 1, file);
        fwrite(&n_chunks, sizeof n_chunks, 1, file);
        fwrite(requests, sizeof *requests, n_requests, file);
        fwrite(chunks, sizeof *chunks, n_chunks, file);
        if (fclose(file)) perror(notes), exit(1);
        n_requests = n_chunks = 0;
        answer(fd, "{}");
    } else {
        answer(fd, NULL);
    }
}

static void send_chunk(int fd) {
    struct stream *s = streams[fd];
    char event[512], out[2048];
    int k = tokens - s->sent < per_chunk ? tokens - s->sent : per_chunk, n = 0;
    if (!s->sent)
        n = sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n");
    s->sent += k;
    int last = s->sent == tokens;
    int size = sprintf(event,
                       "data: {\"id\":\"53788e2cdc3046088a451011895fff1d\",\"object\":\"%s\",\"created\":1795967650,"
                       "\"model\":\"known-truth\",\"choices\":[{\"index\":0,%s,\"logprobs\":null,\"finish_reason\":%s,"
                       "\"matched_stop\":null}],\"usage\":{\"prompt_tokens\":9,\"total_tokens\":%d,\"completion_tokens\":%d,"
                       "\"prompt_tokens_details\":null,\"reasoning_tokens\":0}}\n\n",
                       s->chat ? "chat.completion.chunk" : "text_completion",
                       s->chat ? "\"delta\":{\"role\":\"assistant\",\"content\":\" word\"}" : "\"text\":\" word\"",
                       last ? "\"length\"" : "null", 9 + s->sent, s->sent);
    n += sprintf(out + n, "%x\r\n%s\r\n", size, event);
    if (last) n += sprintf(out + n, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    int64_t at = now();
    if (write(fd, out, n) != n) { /* a client that does not read is no client to measure */
        close(fd);
        return;
    }
    if (!s->first) s->first = at;
    s->last = at;
    chunks = more(chunks, n_chunks, &room_chunks, sizeof *chunks);
    chunks[n_chunks++] = at;
    if (last) {
        s->busy = 0;
        requests = more(requests, n_requests, &room_requests, sizeof *requests);
        requests[n_requests][0] = s->arrived;
        requests[n_requests][1] = s->first;
        requests[n_requests++][2] = s->last;
    } else {
        s->due += gap;
        push(fd);
    }
}

static void request(int fd) {
    struct stream *s = streams[fd];
    s->in[s->have] = 0;
    char *end = strstr(s->in, "\r\n\r\n");
    if (!end) return;
    char *length = strcasestr(s->in, "content-length:");
    int need = end + 4 - s->in + (length && length < end ? atoi(length + 15) : 0);
    if (s->have < need) return;
    s->have = 0;
    if (strncmp(s->in, "POST /v1/", 9)) {
        plain(fd, strchr(s->in, ' ') + 1);
        return;
    }
    s->busy = 1;
    s->chat = !strncmp(s->in, "POST /v1/chat", 13);
    s->sent = 0;
    s->first = 0;
    s->due = s->arrived + ttft;
    push(fd);
}

static void readable(int fd) {
    struct stream *s = streams[fd];
    char control[64];
    struct iovec io = {s->in + s->have, sizeof s->in - 1 - s->have};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &message, 0);
    if (n <= 0) {
        if (n < 0 && errno == EAGAIN) return;
        if (s->busy) /* its fd is still in the heap: the next chunk fails and closes it */
            epoll_ctl(poller, EPOLL_CTL_DEL, fd, NULL), shutdown(fd, SHUT_RDWR);
        else
            close(fd);
        return;
    }
    s->arrived = now();
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec t;
            memcpy(&t, CMSG_DATA(c), sizeof t);
            s->arrived = t.tv_sec * 1000000000LL + t.tv_nsec;
        }
    s->have += n;
    request(fd);
}

int main(int argc, char **argv) {
    if (argc != 7) return fprintf(stderr, "known_truth PORT TTFT_US GAP_US TOKENS TOKENS_PER_CHUNK NOTES\n"), 2;
    notes = argv[6];
    ttft = atoll(argv[2]) * 1000, gap = atoll(argv[3]) * 1000, tokens = atoi(argv[4]), per_chunk = atoi(argv[5]);
    signal(SIGPIPE, SIG_IGN);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 4096)) return perror("listen"), 1;
    poller = epoll_create1(0);
    struct epoll_event events[1024], event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int64_t at = now();
        while (heap_size && streams[heap[0]]->due <= at) send_chunk(pop());
        int64_t wait = heap_size ? streams[heap[0]]->due - now() : 1000000000;
        struct timespec timeout = {0, wait < 0 ? 0 : wait > 999999999 ? 999999999 : wait};
        int n = epoll_pwait2(poller, events, 1024, &timeout, NULL);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd != listener) {
                readable(fd);
                continue;
            }
            while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                if (fd >= MAX_FD) return fprintf(stderr, "too many connections\n"), 1;
                if (!streams[fd]) streams[fd] = malloc(sizeof **streams);
                memset(streams[fd], 0, sizeof **streams);
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
                event.data.fd = fd;
                epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
            }
        }
    }
}
