#include "cpu_optimizer_service/common/text/printable.h"

#include <gtest/gtest.h>

namespace ballast {
namespace {

TEST(Printable, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(Printable("gpt/w \u00e4\u4e2d\U0001f600"), "gpt/w \u00e4\u4e2d\U0001f600");
  EXPECT_EQ(Printable("\x1b[2J\x1b]0;x\x07"), "\\x1b[2J\\x1b]0;x\\x07");
  EXPECT_EQ(Printable("a\rb\tc\x7f"), "a\\x0db\\x09c\\x7f");
  EXPECT_EQ(Printable("\u009b31m"), "\\xc2\\x9b31m");       // CSI in one character.
  EXPECT_EQ(Printable("\u202exyz"), "\\xe2\\x80\\xaexyz");  // Turns text around.
  EXPECT_EQ(Printable("\x9b\xff\xe4"), "\\x9b\\xff\\xe4");  // No UTF-8.
  EXPECT_EQ(Printable("\xe0\x80\x8a\xed\xa0\x80"), "\\xe0\\x80\\x8a\\xed\\xa0\\x80");
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(Printable("a\nb"), "a\\x0ab");
  EXPECT_EQ(Printable("a\nb", Newlines::kKeep), "a\nb");
}

TEST(OneLine, CutsWhatIsTooLongBehindAWholeCharacter) {
  EXPECT_EQ(OneLine("job\ngpt", 20), "job\\x0agpt");
  EXPECT_EQ(OneLine("1234", 4), "1234");
  EXPECT_EQ(OneLine("12345", 4), "1234...");
  EXPECT_EQ(OneLine("123\u4e2d5", 4), "123\u4e2d...");
  EXPECT_EQ(OneLine("123\n5", 4), "123\\x0a...");
  EXPECT_EQ(OneLine(std::string(size_t{64} << 20, '\n'), 9), "\\x0a\\x0a\\x0a...");
}

}  // namespace
}  // namespace ballast
