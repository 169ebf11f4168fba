#include "client/cli/cli_text.h"

#include <gtest/gtest.h>

#include <limits>

namespace ballast::client::cli {
namespace {

TEST(Table, AlignsColumnsAndLeavesNoSpacesAtLineEnds) {
  Table table({{"job"}, {"step", Table::Align::kRight}, {"phase"}});
  table.Add({"gpt-small", "7", "open"});
  table.Add({"x", "12,345", ""});
  EXPECT_EQ(table.ToString(),
            "job          step  phase\n"
            "gpt-small       7  open\n"
            "x          12,345\n");
}

TEST(Format, TablesFieldsAndListsArePrintable) {
  Table table({{"job"}});
  table.Add({"\x1b[1m\nx"});
  EXPECT_EQ(table.ToString(), "job\n\\x1b[1m\\x0ax\n");
  EXPECT_EQ(FormatField("uid", "\x1b"), "uid           \\x1b\n");
  EXPECT_EQ(FormatNames("unused", {"a\nb", "\x1b"}), "unused: a\\x0ab, \\x1b\n");
}

TEST(Format, BytesHaveAUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1024), "1.00 KiB");
  EXPECT_EQ(FormatBytes(int64_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(FormatBytes(std::numeric_limits<int64_t>::max()), "8.00 EiB");
}

TEST(Format, CountsHaveSeparators) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
  EXPECT_EQ(FormatCount(-123456), "-123,456");
}

TEST(Format, NumbersMayNotBeFinite) {
  EXPECT_EQ(FormatNumber(0.1), "0.1");
  EXPECT_EQ(FormatNumber(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(FormatNumber(-std::numeric_limits<double>::infinity()), "-inf");
  EXPECT_EQ(FormatNumber(std::numeric_limits<double>::quiet_NaN()), "nan");
}

TEST(Format, ShapesAreLists) {
  EXPECT_EQ(FormatShape({}), "[]");
  EXPECT_EQ(FormatShape({768, 3072}), "[768, 3072]");
}

TEST(Format, ExactNumbersReadBackTheSame) {
  EXPECT_EQ(FormatExactly(0.1 + 0.2), "0.30000000000000004");
  EXPECT_EQ(FormatExactly(1e-8), "1e-08");
}

TEST(Format, NamesAreBrokenBeforeTheHundredthColumn) {
  EXPECT_EQ(FormatNames("lacks", std::vector<std::string>{"a", "b"}), "lacks: a, b\n");
  // 100 columns fit, and not one more.
  const std::string fits(91, 'f');
  EXPECT_EQ(FormatNames("lacks", std::vector<std::string>{fits, "b"}),
            "lacks: " + fits + ",\n    b\n");
  EXPECT_EQ(FormatNames("lacks", std::vector<std::string>{fits.substr(1), "b"}),
            "lacks: " + fits.substr(1) + ", b\n");
}

TEST(Format, MagnitudesShowTheDecadesBetweenTheFirstAndTheLast) {
  std::vector<int64_t> counts(16);
  EXPECT_EQ(FormatMagnitudes(counts), "");
  counts[9] = 4000;
  counts[11] = 100;
  EXPECT_EQ(FormatMagnitudes(counts),
            "    1e-03 .. 1e-02           4,000  ########################################\n"
            "    1e-02 .. 1e-01               0\n"
            "    1e-01 .. 1e+00             100  #\n");
  // The first and the last decade also count everything beyond them.
  counts.assign(16, 0);
  counts[0] = 1;
  EXPECT_EQ(FormatMagnitudes(counts).substr(0, 18), "        0 .. 1e-11");
  counts.assign(16, 0);
  counts[15] = 1;
  EXPECT_EQ(FormatMagnitudes(counts).substr(0, 18), "    1e+03 .. inf  ");
}

}  // namespace
}  // namespace ballast::client::cli
