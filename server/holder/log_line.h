// Log lines without spdlog: the holder's, which allocates nothing, and those of a process that ends
// before it has a log.
#ifndef BALLAST_SERVER_HOLDER_LOG_LINE_H_
#define BALLAST_SERVER_HOLDER_LOG_LINE_H_

namespace ballast::server {

enum class LogFormat { kText, kJson };

// As in syslog(3): for systemd's journal a line begins with "<4>".
enum LogPriority {
  kErrorPriority = 3,
  kWarningPriority = 4,
  kInfoPriority = 6,
  kDebugPriority = 7
};

// For the rest of the process's life; call it before the first line.
void SetLogFormat(LogFormat format);
LogFormat TheLogFormat();

// Whether standard error is systemd's journal: JOURNAL_STREAM names its device and inode.
bool LogIsJournal();

// "ballastd: ..." and a newline, at most 2 KiB, in one write; with JSON an object. Allocates
// nothing.
[[gnu::format(printf, 2, 3)]] void LogLine(LogPriority priority, const char* format, ...);

}  // namespace ballast::server

#endif  // BALLAST_SERVER_HOLDER_LOG_LINE_H_
